//! Formats the page.

use std::fmt::Write;

use crate::data::Rfc;
use crate::{Finding, Place, Survey};

const HEAD: &str = "# Requirements

<!-- Written by `make doc` from docs/requirements and from comments in the sources. -->

What the RFCs ask of a host, where Portolan does it, and which test proves it. Numbers such as
MUST-38 are those of RFC 9293, Appendix B; those of other RFCs are ours. A note says what is done
otherwise, or not, and why.

";

pub(crate) fn render(survey: &Survey) -> String {
    let mut page = String::from(HEAD);
    page.push_str("| RFC | title | requirements | proved by a test | with a note |\n");
    page.push_str("|---|---|---|---|---|\n");
    for rfc in &survey.rfcs {
        let count = |wanted: fn(&Finding) -> bool| survey.findings(rfc).filter(wanted).count();
        let _ = writeln!(
            page,
            "| [{0}](#rfc-{0}) | {1} | {2} | {3} | {4} |",
            rfc.number,
            rfc.title,
            rfc.requirements.len(),
            count(|f| !f.code.is_empty() && !f.tests.is_empty()),
            count(|f| f.requirement.reason.is_some()),
        );
    }
    for rfc in &survey.rfcs {
        section(survey, rfc, &mut page);
    }
    page
}

fn section(survey: &Survey, rfc: &Rfc, page: &mut String) {
    let _ = write!(
        page,
        "\n## RFC {}\n\n{}.\n\n| | § | requirement | where | proved by | note |\n|---|---|---|---|---|---|\n",
        rfc.number, rfc.title
    );
    for finding in survey.findings(rfc) {
        let requirement = finding.requirement;
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} | {} |",
            requirement.id,
            requirement.section,
            requirement.text,
            links(&finding.code),
            links(&finding.tests),
            requirement.reason.as_deref().unwrap_or(""),
        );
    }
}

fn links(places: &[Place]) -> String {
    let link = |place: &Place| {
        let short = place
            .path
            .trim_start_matches("crates/")
            .replace("/src/", "/");
        let item = match place.item.as_str() {
            "" => String::new(),
            item => format!(" `{item}`"),
        };
        format!("[{short}](../../{}){item}", place.path)
    };
    places.iter().map(link).collect::<Vec<_>>().join("<br>")
}
