"""The worker tasks (relay, sweeper, reaper, completer, reconciler) and the service that paces and stops them."""
