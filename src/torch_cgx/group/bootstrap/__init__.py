"""The setup of a group: its ranks find each other, compare their settings, and open their shared resources."""
