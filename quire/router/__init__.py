"""Which replica a request goes to, replicas in processes of their own, and a proxy in front of running servers."""
