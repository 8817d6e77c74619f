"""What happened, told as events, and what makes logs, metrics and traces of them."""
