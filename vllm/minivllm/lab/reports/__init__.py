"""What the lesson scripts print, draw and accept on the command line: one module a lesson."""
