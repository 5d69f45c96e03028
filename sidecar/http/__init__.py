"""The HTTP interface of the service: routes, hot routes, limits, live events.

May import `sidecar.service` and what it may.
"""
