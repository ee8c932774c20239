"""Speed and energy of attention on Hopper: ours beside its peers."""
