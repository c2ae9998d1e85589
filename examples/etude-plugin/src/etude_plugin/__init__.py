"""An algorithm, task, network, reward source, log writer and dataset format for Etude."""
