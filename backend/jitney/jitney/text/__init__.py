"""Text to token ids and back: tokenizer, chats, stop strings, one request's output."""
