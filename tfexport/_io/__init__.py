"""Files, read strictly and written whole: text, JSON, sealed JSON, directories."""
