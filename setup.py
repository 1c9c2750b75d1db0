"""What pyproject.toml cannot say: the configurations lie beside the package here, and in it once it is installed."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["lightning_fed*"]), "lightning_fed.configs"],
    package_dir={"lightning_fed.configs": "configs"},
    package_data={
        "lightning_fed": ["py.typed", "lab/report/page.*s", "lab/studies/figures/*.csv"],
        "lightning_fed.configs": ["**/*.yaml"],
    },
)
