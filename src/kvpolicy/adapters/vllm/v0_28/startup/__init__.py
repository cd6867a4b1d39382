"""What is settled before an engine is ready, in whichever process: arguments, guards, the list of private names."""
