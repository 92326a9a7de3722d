// Before anything is painted: the theme that was chosen here, if any. Otherwise the system's.
{
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
