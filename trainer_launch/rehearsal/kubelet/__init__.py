"""The kubelet of a rehearsal: pods as local processes, with networks, memory limits and folders of their own."""
