"""One decoder step on a GPU, or as a dry run on the CPU: who takes how long, and how much of it the device works."""
