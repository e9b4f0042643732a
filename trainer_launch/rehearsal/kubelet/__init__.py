"""The kubelet of a rehearsal: pods as local processes, with networks and folders of their own."""
