"""Optional integrations with other servers, each with its own extra."""
