//! The committed report is complete, rendered by this build, and displayed properly by a browser, if one is installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use portolan_bench::process::run_within;
use portolan_bench::report::{ENTRIES, render};
use serde_json::Value;

/// Replaces the page with a list of layout errors: plot labels that overflow or overlap, and a page that is wider
/// than its window.
const CHECK: &str = r#"<script>
const found = [];
if (document.documentElement.scrollWidth > innerWidth) found.push("page wider than " + innerWidth);
const plots = document.querySelectorAll("svg.plot");
for (const svg of plots) {
  const frame = svg.getBoundingClientRect();
  if (frame.width < 100 || frame.height < 40) found.push("no size: " + svg.getAttribute("aria-label"));
  const boxes = [];
  for (const text of svg.querySelectorAll("text")) {
    const box = text.getBoundingClientRect();
    const word = svg.getAttribute("aria-label") + ": " + text.textContent.trim();
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
      found.push("outside: " + word);
    for (const [other, name] of boxes) {
      const across = Math.min(box.right, other.right) - Math.max(box.left, other.left);
      const down = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
      if (across > 2 && down > 5) found.push("over " + name + ": " + word);
    }
    boxes.push([box, text.textContent.trim()]);
  }
}
document.body.innerHTML = "PLOTS " + plots.length + " FOUND " + found.length + " " + found.slice(0, 20).join("; ") + " END";
</script>"#;

fn committed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/report")
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn the_committed_report_has_every_table_and_figure() {
    let report: Value = serde_json::from_str(&text(&committed().join("report.json"))).unwrap();
    for entry in ENTRIES {
        let exhibit = &report["exhibits"][entry.id];
        let panels = exhibit["panels"].as_array().map_or(0, Vec::len);
        assert!(panels > 0, "{}", entry.id);
    }
}

#[test]
fn the_committed_page_is_what_this_build_makes_of_its_figures() {
    let scratch = scratch("render");
    let page = rendered(&scratch);
    assert!(
        page == text(&committed().join("index.html")),
        "`portolan report --render --output docs/report` writes it anew"
    );
    fs::remove_dir_all(scratch).unwrap();
}

#[test]
fn a_browser_shows_every_plot_and_nothing_overflows() {
    let Some(browser) = browser() else {
        eprintln!("no browser is installed: the page is not looked at");
        return;
    };
    let scratch = scratch("browser");
    let page = rendered(&scratch);
    let plots = page.matches("<svg class=\"plot\"").count();
    let checked = scratch.join("checked.html");
    fs::write(
        &checked,
        page.replace("</body>", &format!("{CHECK}</body>")),
    )
    .unwrap();
    for width in [1100, 600] {
        let mut command = Command::new(&browser);
        command
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"])
            .arg(format!(
                "--user-data-dir={}",
                scratch.join("profile").display()
            ))
            .arg(format!("--window-size={width},900"))
            .arg(format!("file://{}", checked.display()));
        let shown = run_within(&mut command, Duration::from_secs(120)).unwrap();
        let verdict = shown.split_once("PLOTS ").expect("the check has run").1;
        let expected = format!("{plots} FOUND 0 ");
        assert!(verdict.starts_with(&expected), "{width} pixels: {verdict}");
    }
    fs::remove_dir_all(scratch).unwrap();
}

/// Renders the page of the committed figures with this build.
fn rendered(directory: &Path) -> String {
    let figures = committed().join("report.json");
    fs::copy(&figures, directory.join("report.json")).expect("there is a committed report");
    render(directory).unwrap();
    text(&directory.join("index.html"))
}

fn scratch(name: &str) -> PathBuf {
    let name = format!("portolan-report-{name}-{}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    fs::create_dir_all(&directory).unwrap();
    directory
}

fn browser() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .flat_map(|folder| ["chromium", "google-chrome"].map(|name| folder.join(name)))
        .find(|program| program.is_file())
}
