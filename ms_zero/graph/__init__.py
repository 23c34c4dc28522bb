"""The graph engine: MindSpore's compiled path from the config, models and checkpoints of the eager one."""
