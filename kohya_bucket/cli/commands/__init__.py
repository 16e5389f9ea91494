"""The commands, in the order of the help, with the line that says what each does.

`plan` is the function of that name in `plan.py`. A module of several, such as `cache.py`, names them in
`SUBCOMMANDS`; what it takes of option groups is in `OPTION_GROUPS`, by the function's name, as arguments of
`with_option_groups`. `KIND` is the class of its commands, where it is not `PlainCommand`.
"""

SECTIONS = {
    "Look": {
        "plan": "What a config trains: buckets, crops, steps, what is left out.",
        "analyze": "Check a dataset: crops, broken files, what to change.",
        "explore": "A page that shows every image in its bucket.",
        "simulate": "Explain one image: its bucket, resize and crop.",
        "compare": "Compare rules, also those of other trainers, on your images.",
        "fix": "Turn, convert or set aside what a trainer would misread.",
        "doctor": "Check this environment, sd-scripts, a config and its caches.",
    },
    "Train": {
        "activate": "Put the adapter behind every training of this Python.",
        "precompute": "Encode images once; run again for what is missing or stale.",
        "cache": "Check, clean up and move stored latents; keep image sizes.",
    },
    "Buckets": {
        "buckets": "List the bundled sets, chart one, make one from your images.",
    },
}

COMMANDS = {name: line for section in SECTIONS.values() for name, line in section.items()}

OLD_WORDS = {"deactivate": ["activate", "--off"]}
