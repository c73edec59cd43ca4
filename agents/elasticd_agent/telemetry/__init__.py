"""Reports of a job: the event log, metrics, goodput, and the console.

Entry points: event_log.open_event_log, metrics.Metrics, console.PlainConsole. The deciding thread reports, HTTP threads
render. Reporting never fails: a full disk or a blocked terminal never delays the caller.
"""
