"""The engine behind the OpenAI API."""
