"""The operations kit: alert rules, a dashboard, units, manifests and runbooks, made from templates by `oncekey kit`.

`settings` is the table of settings, `making` turns templates into files and writes them, `dashboard` builds the one
file that has no template. The runbooks are the pages of `docs/runbooks`, which the wheel contains unchanged.
"""
