"""What runs behind the scenes: tasks that look for work, and the service that paces and stops them."""
