"""What no engine version forces: messages between processes, options, books, the session object, a compactor."""
