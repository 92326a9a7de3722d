"""The console's pages: templates, ES modules and styles, all served from this folder.

A page is a frame without data: its module asks the API for what it shows, with the browser's
session. So a page is the same for everybody, and what a caller may see is decided in one place.
"""
