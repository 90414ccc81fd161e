"""Names of the classes that compute attention to the source in PyTorch."""

from tfexport.nn.cache import Cross, Source

PaddedSource = Source
CrossCache = Cross
