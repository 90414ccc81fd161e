"""The running of the HTTP server: its socket, its connections, its signals, and who may ask."""
