"""Streams from any OpenAI-compatible server, with a time stamp and a token count for each chunk."""
