"""One room per lesson: its draw functions, explorers and exercise checks."""
