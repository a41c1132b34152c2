"""The classroom: imports the library, never the other way round."""
