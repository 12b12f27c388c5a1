//! The page: one self-contained file without scripts.

use std::fmt::Write;

use super::model::{Cell, Claim, Exhibit, Panel, Quoted, Report, Row, Source, Table};
use super::papers::Paper;
use super::plot::{self, amount, escape};
use super::{ENTRIES, Entry};

const STYLE: &str = include_str!("page.css");

/// Formats into a string, which cannot fail.
macro_rules! put {
    ($to:expr, $($what:tt)*) => { let _ = write!($to, $($what)*); };
}

pub(super) fn page(report: &Report) -> String {
    let mut page = String::new();
    put!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>Portolan: the papers' tables and figures, measured</title>\
         <style>{STYLE}{}</style></head>\n<body>\n",
        plot::style()
    );
    head(&mut page, report);
    contents(&mut page, report);
    for paper in Paper::ALL {
        let mut entries = ENTRIES
            .iter()
            .filter(|entry| entry.paper == paper)
            .peekable();
        if entries.peek().is_none() {
            continue;
        }
        put!(
            page,
            "<h2 id=\"{0}\">{1}</h2>\n<p class=\"soft\">{2}</p>\n",
            paper.short().to_lowercase(),
            match paper {
                Paper::Today => escape(paper.title()),
                _ => format!("{}: {}", paper.short(), escape(paper.title())),
            },
            escape(paper.authors())
        );
        for entry in entries {
            section(&mut page, entry, report.exhibits.get(entry.id));
        }
    }
    page.push_str("</body></html>\n");
    page
}

fn head(page: &mut String, report: &Report) {
    let machine = &report.machine;
    let known = report.exhibits.values();
    let claims = known.clone().flat_map(|exhibit| &exhibit.claims);
    let (holding, all) = claims.fold((0, 0), |(holding, all), claim| {
        (holding + usize::from(claim.holds), all + 1)
    });
    put!(
        page,
        "<h1>Portolan: the papers' tables and figures, measured</h1>\n\
         <p>Every table and figure of the five papers that Portolan is built after: the paper's own numbers, and on this \
         machine the kernel's stack, server-based operation and Portolan's forms, in turns on one bed. {holding} of {all} \
         shapes are the papers'; where one is not, its entry says why.</p>\n\
         <p class=\"soft\">{}, {} cores, {} MiB{}; Linux {}; Portolan {}. Two network namespaces joined by a veth pair, one \
         core for each side. Medians of several runs, with the least and the most of them.</p>\n",
        escape(&machine.processor),
        machine.cores,
        machine.memory_mib,
        if machine.is_virtual {
            ", a virtual machine"
        } else {
            ""
        },
        escape(&machine.kernel),
        escape(&machine.portolan),
    );
    if known.clone().any(|exhibit| exhibit.is_quick) {
        page.push_str("<p class=\"soft\">Some were measured with <code>--quick</code>: fewer points and shorter runs.</p>\n");
    }
    let stolen = known.map(|exhibit| exhibit.state.steal).fold(0.0, f64::max);
    if stolen > 0.02 {
        put!(
            page,
            "<p class=\"soft\">The hypervisor gave up to {:.0} % of the machine's time to others during an entry: see there.</p>\n",
            stolen * 100.0
        );
    }
}

fn contents(page: &mut String, report: &Report) {
    page.push_str("<nav>\n");
    for paper in Paper::ALL {
        let short = paper.short();
        put!(
            page,
            "<p><a href=\"#{}\">{}</a></p><ul>\n",
            short.to_lowercase(),
            escape(match paper {
                Paper::Today => paper.title(),
                _ => short,
            })
        );
        for entry in ENTRIES.iter().filter(|entry| entry.paper == paper) {
            let state = match report.exhibits.get(entry.id) {
                None => " <span class=\"soft\">(not measured)</span>".to_owned(),
                Some(exhibit) => standing(&exhibit.claims),
            };
            put!(
                page,
                "<li><a href=\"#{}\">{}</a> {}{state}</li>\n",
                entry.id,
                escape(&entry.name()),
                escape(entry.title)
            );
        }
        page.push_str("</ul>\n");
    }
    page.push_str("</nav>\n");
}

fn standing(claims: &[Claim]) -> String {
    let differing = claims.iter().filter(|claim| !claim.holds).count();
    match (claims.len(), differing) {
        (0, _) => String::new(),
        (_, 0) => " <span class=\"soft\">✓</span>".to_owned(),
        (all, differing) => format!(" <span class=\"soft\">({differing} of {all} differ)</span>"),
    }
}

fn section(page: &mut String, entry: &Entry, exhibit: Option<&Exhibit>) {
    put!(
        page,
        "<section><h3 id=\"{}\">{}: {}</h3>\n",
        entry.id,
        escape(&entry.name()),
        escape(entry.title)
    );
    let Some(exhibit) = exhibit else {
        put!(
            page,
            "<p class=\"soft\">Not measured: <code>portolan report --only {}</code></p></section>\n",
            entry.id
        );
        return;
    };
    if let Some(original) = &exhibit.original {
        quoted(page, original);
    }
    page.push_str("<div class=\"here\"><h4>Here</h4>\n");
    for panel in &exhibit.panels {
        match panel {
            Panel::Table(table) => put_table(page, table),
            Panel::Plot(plot) => {
                put!(
                    page,
                    "<figure><figcaption>{}</figcaption>{}</figure>\n",
                    escape(&plot.title),
                    plot::draw(plot)
                );
            }
        }
    }
    page.push_str("</div>\n");
    claims(page, &exhibit.claims);
    for note in &exhibit.notes {
        put!(page, "<p>{}</p>\n", escape(note));
    }
    put!(
        page,
        "<p class=\"soft\"><code>{}</code> – {:.0} s; load {:.1}, {:.1} % of the machine's time stolen</p></section>\n",
        escape(&exhibit.command),
        exhibit.seconds,
        exhibit.state.load,
        exhibit.state.steal * 100.0
    );
}

fn quoted(page: &mut String, original: &Quoted) {
    put!(
        page,
        "<div class=\"original\"><h4>The paper</h4>\n<p class=\"soft\">{}</p>\n",
        escape(&original.setting)
    );
    if !original.facts.is_empty() {
        page.push_str("<ul>\n");
        for fact in &original.facts {
            put!(page, "<li>{}</li>\n", escape(fact));
        }
        page.push_str("</ul>\n");
    }
    for table in &original.tables {
        put_table(page, table);
    }
    page.push_str("</div>\n");
}

fn claims(page: &mut String, claims: &[Claim]) {
    if claims.is_empty() {
        return;
    }
    page.push_str("<ul class=\"claims\">\n");
    for claim in claims {
        let (class, word) = if claim.holds {
            ("holds", "as there")
        } else {
            ("differs", "differs")
        };
        put!(
            page,
            "<li class=\"{class}\"><b>{word}</b> {} – {}",
            escape(&claim.shape),
            escape(&claim.here)
        );
        if !claim.holds {
            let why = match claim.why.as_str() {
                "" => "no explanation is known: measure again on a quiet machine",
                why => why,
            };
            put!(page, "<br><i>Why:</i> {}", escape(why));
        }
        page.push_str("</li>\n");
    }
    page.push_str("</ul>\n");
}

fn put_table(page: &mut String, table: &Table) {
    // Smaller letters keep tables of many columns within the width of the page.
    let class = if table.head.len() > 9 {
        " class=\"wide\""
    } else {
        ""
    };
    put!(
        page,
        "<div class=\"scroll\"><table{class}><caption>{}</caption><thead><tr><th></th>",
        escape(&table.title)
    );
    for head in &table.head {
        put!(page, "<th>{}</th>", escape(head));
    }
    page.push_str("</tr></thead><tbody>\n");
    for row in &table.rows {
        put_row(page, row, table.head.len());
    }
    page.push_str("</tbody></table></div>\n");
}

fn put_row(page: &mut String, row: &Row, columns: usize) {
    let source = match row.source {
        Source::Paper => "paper",
        Source::Kernel => "kernel",
        Source::Server => "server",
        Source::Portolan => "portolan",
    };
    put!(
        page,
        "<tr><th scope=\"row\"><span class=\"key of-{source}\"></span>{}</th>",
        escape(&row.label)
    );
    let missing = std::iter::repeat(&Cell::Empty);
    for cell in row.cells.iter().chain(missing).take(columns) {
        match cell {
            // A paper's numbers are printed as in the paper.
            Cell::Number(number) if row.source == Source::Paper => {
                put!(page, "<td>{number}</td>");
            }
            Cell::Number(number) => {
                put!(page, "<td>{}</td>", amount(*number));
            }
            Cell::Spread(spread) => {
                put!(
                    page,
                    "<td>{}<small>{}–{}</small></td>",
                    amount(spread.median),
                    amount(spread.min),
                    amount(spread.max)
                );
            }
            Cell::Text(text) => {
                put!(page, "<td class=\"absent\">{}</td>", escape(text));
            }
            Cell::Empty => page.push_str("<td class=\"absent\">–</td>"),
        }
    }
    page.push_str("</tr>\n");
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::model::{AxisLabel, Content, Curve, Machine, Plot, Style};
    use super::*;
    use crate::figure::Spread;
    use crate::machine::MachineState;

    fn exhibit(entry: &Entry) -> Exhibit {
        let spread = Spread {
            median: 2.0,
            min: 1.0,
            max: 3.0,
        };
        let content = Content::default()
            .with(Table::new("a table", ["x"]).row("a < b", Source::Kernel, [spread]))
            .with(Plot {
                title: "a plot".to_owned(),
                x: AxisLabel::linear("x"),
                y: AxisLabel::linear("y"),
                style: Style::Points,
                curves: vec![Curve::of("c", Source::Portolan, [(1.0, 2.0)])],
            })
            .claim("it is so", true, "2".to_owned(), "")
            .claim("it is not so", false, "3".to_owned(), "because");
        Exhibit {
            paper: entry.paper.short().to_owned(),
            number: entry.number.to_owned(),
            title: entry.title.to_owned(),
            command: "portolan report".to_owned(),
            original: super::super::originals().get(entry.id).map(|o| o.quoted()),
            panels: content.panels,
            claims: content.claims,
            notes: content.notes,
            is_quick: false,
            seconds: 1.0,
            state: MachineState::default(),
            at: 0,
        }
    }

    fn report(entries: &[Entry]) -> Report {
        let known = entries
            .iter()
            .map(|entry| (entry.id.to_owned(), exhibit(entry)));
        Report {
            machine: Machine {
                processor: "a processor".to_owned(),
                cores: 2,
                memory_mib: 1,
                kernel: "6".to_owned(),
                is_virtual: true,
                portolan: "0".to_owned(),
            },
            exhibits: BTreeMap::from_iter(known),
        }
    }

    #[test]
    fn the_page_has_a_section_with_a_plot_for_every_entry_and_needs_nothing_else() {
        let page = page(&report(ENTRIES));
        assert_eq!(page.matches("<section>").count(), ENTRIES.len());
        assert_eq!(page.matches("<svg class=\"plot\"").count(), ENTRIES.len());
        for entry in ENTRIES {
            assert!(
                page.contains(&format!("<h3 id=\"{}\">", entry.id)),
                "{}",
                entry.id
            );
        }
        assert!(!page.contains("Not measured"));
        assert!(page.contains("a &lt; b") && page.contains("1.00–3.00"));
        assert!(page.contains("<i>Why:</i> because"));
        for outside in ["<script", "<link", "src=", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
    }

    #[test]
    fn what_is_not_measured_is_said() {
        let page = page(&report(&[]));
        assert_eq!(page.matches("Not measured").count(), ENTRIES.len());
    }

    #[test]
    fn a_report_is_read_as_it_was_written() {
        let before = report(ENTRIES);
        let text = serde_json::to_string(&before).unwrap();
        let after: Report = serde_json::from_str(&text).unwrap();
        assert_eq!(page(&after), page(&before));
    }
}
