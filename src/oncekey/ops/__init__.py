"""What operators look at: how a store stands, what is wrong with it, and what a retry will meet. Pure, over core."""
