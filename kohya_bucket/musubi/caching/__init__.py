"""musubi-tuner's caches: whole files that say what they were made from, one for each item of the config."""
