"""Tasks that ask a model for a program: their files, what is cut out of answers, and the judging.

Tasks of our own stand in `tasks`, a YAML file each.
"""
