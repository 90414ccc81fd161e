"""What requests of the Open Inference Protocol ask for and are answered with, whatever carries them."""
