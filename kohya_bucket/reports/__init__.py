"""What a dataset becomes under a rule: numbers, recommendations, and a page to look at."""
