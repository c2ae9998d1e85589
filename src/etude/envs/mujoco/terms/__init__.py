"""Terms for arms and legs: observations, rewards, terminations, resets."""
