"""Where files lie: on this machine, or where pyarrow finds them."""
