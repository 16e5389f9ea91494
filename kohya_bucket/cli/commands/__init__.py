"""The commands, in the order of the help, with the line that says what each does.

`plan` is the function of that name in `plan.py`. A module of several, such as `cache.py`, names them in
`SUBCOMMANDS`; what it takes of option groups is in `OPTION_GROUPS`, by the function's name, as arguments of
`with_option_groups`. `KIND` is the class of its commands, where it is not `PlainCommand`.
"""

SECTIONS = {
    "Start here": {
        "explore": "A page that shows every image in its bucket.",
        "fix": "Turn, convert or set aside what a trainer would misread.",
        "plan": "What a config trains: buckets, crops, steps, what is left out.",
    },
    "Train": {
        "activate": "Put the adapter behind every training of this Python.",
        "precompute": "Encode images once; run again for what is missing or stale.",
        "cache": "Check, clean up and move stored latents; keep image sizes.",
        "doctor": "What would stop a training or harm it, and what to do.",
    },
    "More": {
        "analyze": "Check a dataset: crops, broken files, what to change.",
        "simulate": "Explain one image: its bucket, resize and crop.",
        "compare": "Compare rules, also those of other trainers, on your images.",
        "buckets": "List the bundled sets, chart one, make one from your images.",
    },
}

COMMANDS = {name: line for section in SECTIONS.values() for name, line in section.items()}

OLD_WORDS = {"deactivate": ["activate", "--off"]}
