"""Files, options and requests with something wrong in them: each is refused in one line, or is what it was."""
