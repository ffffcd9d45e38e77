"""One question each; records in, a result out."""
