"""An algorithm, a task, a policy network, a reward source and a log writer for Etude."""
