"""LoRA adapters: read from PEFT's files, and kept in memory while requests use them."""
