"""Training text: prompts, self-distillation, chat rendering, and the hidden-state cache."""
