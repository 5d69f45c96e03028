"""Events of a run: their schema, the log, the terminal and the WebSocket.

May import `discovery.execution.stopping`.
"""
