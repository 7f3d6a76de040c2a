"""Models exported by name: every module here with a function ``recipe() -> Recipe``."""
