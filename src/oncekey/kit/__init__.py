"""The operations kit: alert rules, a dashboard, units, manifests and runbooks, made from templates by `oncekey kit`.

`settings` is the table of what can be said, `making` turns templates into files and writes them, `dashboard` builds the
one file that is no template. The runbooks are the pages of `docs/runbooks`, which the wheel holds as they are.
"""
