"""What a data set becomes under a rule: numbers, recommendations, and a page to look at."""
