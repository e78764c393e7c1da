"""The study: its targets, which folders of results answer them, its tables and its pictures. No part of any wheel.

criteria.yaml, folders.yaml and claims.yaml are the data. Scripts: pages.py (figures and tables of pages), pictures.py.
"""
