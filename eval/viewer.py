"""The command `python -m eval.viewer`; eval/report/viewer.py is the viewer."""

from eval.report.viewer import main

if __name__ == "__main__":
    main()
