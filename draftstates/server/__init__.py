"""A server's life: settings, address, lease, supervisor, launchers."""
