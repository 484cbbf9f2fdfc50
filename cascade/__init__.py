"""Runtime, escalation policies, gate and fallback, sessions, server, engine connector."""
