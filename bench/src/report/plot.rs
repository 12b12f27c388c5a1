//! Plots as SVG. Colours are names for [`STYLE`], which defines them for both colour schemes; without style sheets, the
//! colours of the light scheme are used.

use std::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::model::{AxisLabel, Curve, Plot, Scale, Source, Style};

const WIDTH: u32 = 680;
const HEIGHT: u32 = 330;
const LEGEND_LINE: u32 = 20;
const BAR_LINE: u32 = 28;

/// Maximum width of a letter in pixels, at the size of all text.
const LETTER: u32 = 7;
const LETTERS: u32 = 12;

/// Curves with at least this many points are drawn thin.
const MANY: usize = 150;

const INK: RGBColor = RGBColor(0x1b, 0x1f, 0x24);
const GRID: RGBColor = RGBColor(0xdd, 0xe1, 0xe6);

const PAPER: RGBColor = RGBColor(0x6e, 0x77, 0x81);
const KERNEL: RGBColor = RGBColor(0x0b, 0x61, 0xb5);
const SERVER: RGBColor = RGBColor(0xb3, 0x5c, 0x00);
/// Colours of Portolan's forms in turn, and of other sources with several curves in a plot.
const FORMS: [RGBColor; 7] = [
    RGBColor(0x0a, 0x7d, 0x4f),
    RGBColor(0x9c, 0x27, 0x8f),
    RGBColor(0xc6, 0x2f, 0x2f),
    RGBColor(0x8a, 0x6d, 0x00),
    RGBColor(0x00, 0x7c, 0x8a),
    RGBColor(0x5a, 0x4f, 0xcf),
    RGBColor(0x7a, 0x4a, 0x1e),
];

/// Colours of the dark scheme, by the light scheme's.
const DARK: [(RGBColor, &str); 12] = [
    (INK, "#e6e8eb"),
    (GRID, "#3a4048"),
    (PAPER, "#a3abb5"),
    (KERNEL, "#6cb2ff"),
    (SERVER, "#ffab5c"),
    (FORMS[0], "#54d69a"),
    (FORMS[1], "#e68bdb"),
    (FORMS[2], "#ff8a80"),
    (FORMS[3], "#e3c450"),
    (FORMS[4], "#5fd4e2"),
    (FORMS[5], "#aca4ff"),
    (FORMS[6], "#d3a67c"),
];

/// Returns the style sheet that makes plots dark if the reader prefers that.
pub(super) fn style() -> String {
    let rules = DARK.map(|(light, dark)| {
        let RGBColor(red, green, blue) = light;
        let light = format!("#{red:02X}{green:02X}{blue:02X}");
        format!("svg.plot [fill=\"{light}\"]{{fill:{dark}}}svg.plot [stroke=\"{light}\"]{{stroke:{dark}}}")
    });
    format!(
        "@media screen and (prefers-color-scheme:dark){{{}}}",
        rules.concat()
    )
}

/// Returns the plot with its own style sheet, for a separate file.
pub(super) fn standalone(plot: &Plot) -> String {
    let svg = draw(plot);
    let background = "<style>svg.plot{background:#fff}@media (prefers-color-scheme:dark){svg.plot{background:#16191d}}";
    let style = format!("{background}{}</style>", style());
    match svg.find('>') {
        Some(end) => format!("{}>{style}{}", &svg[..end], &svg[end + 1..]),
        None => svg,
    }
}

/// Returns the plot as an element of a page, no wider than its container.
pub(super) fn draw(plot: &Plot) -> String {
    let mut svg = String::new();
    let drawn = match plot.style {
        Style::Bars => bars(plot, &mut svg),
        Style::Points | Style::Line => chart(plot, &mut svg),
    };
    drawn.expect("a string takes what is drawn");
    let (_, body) = svg.split_once("<svg ").expect("the backend makes SVG");
    let label = escape(&plot.title);
    format!("<svg class=\"plot\" role=\"img\" aria-label=\"{label}\" {body}")
}

pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

fn chart(plot: &Plot, svg: &mut String) -> Drawn {
    let (columns, lines) = legend_grid(&plot.curves);
    let size = (WIDTH, HEIGHT + lines * LEGEND_LINE + 6);
    let root = SVGBackend::with_string(svg, size).into_drawing_area();
    let (area, legend) = root.split_vertically(HEIGHT);
    let xs = plot
        .curves
        .iter()
        .flat_map(|curve| curve.points.iter().map(|point| point.x));
    let ys = plot.curves.iter().flat_map(|curve| {
        curve.points.iter().flat_map(|point| {
            let [least, most] = point.range.unwrap_or([point.y; 2]);
            [least, most]
        })
    });
    let (x, y) = (Axis::over(&plot.x, xs), Axis::over(&plot.y, ys));
    let mut chart = ChartBuilder::on(&area)
        .margin(10)
        .margin_right(20)
        .x_label_area_size(44)
        .y_label_area_size(66)
        .build_cartesian_2d(x, y)?;
    chart
        .configure_mesh()
        .axis_style(INK)
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .label_style(text())
        .axis_desc_style(text())
        .x_desc(plot.x.label.as_str())
        .y_desc(plot.y.label.as_str())
        .draw()?;
    for (curve, color) in plot.curves.iter().zip(colors(&plot.curves)) {
        let points = curve.points.iter().map(|point| (point.x, point.y));
        let width = if curve.points.len() > MANY { 1 } else { 2 };
        chart.draw_series(LineSeries::new(points.clone(), color.stroke_width(width)))?;
        if plot.style == Style::Line {
            continue;
        }
        chart.draw_series(points.map(|point| Circle::new(point, 3, color.filled())))?;
        let ranges = curve
            .points
            .iter()
            .filter_map(|point| Some((point.x, point.range?)));
        chart.draw_series(ranges.map(|(x, [least, most])| {
            PathElement::new(vec![(x, least), (x, most)], color.stroke_width(1))
        }))?;
    }
    for (number, (curve, color)) in plot.curves.iter().zip(colors(&plot.curves)).enumerate() {
        let number = number as u32;
        let x = 76 + (number % columns) * ((WIDTH - 76) / columns);
        let y = 4 + (number / columns) * LEGEND_LINE;
        let (x, y) = (x as i32, y as i32);
        legend.draw(&Rectangle::new(
            [(x, y + 4), (x + 14, y + 8)],
            color.filled(),
        ))?;
        legend.draw(&Text::new(curve.label.clone(), (x + 20, y), text()))?;
    }
    root.present()
}

fn legend_grid(curves: &[Curve]) -> (u32, u32) {
    let longest = curves.iter().map(|curve| curve.label.chars().count()).max();
    let width = longest.unwrap_or(0) as u32 * LETTER + 32;
    let columns = ((WIDTH - 76) / width).clamp(1, 4);
    (columns, (curves.len() as u32).div_ceil(columns))
}

/// Draws one bar for each curve, with its value behind it.
fn bars(plot: &Plot, svg: &mut String) -> Drawn {
    const NAMES: u32 = 270;
    const VALUES: u32 = 90;
    let size = (WIDTH, plot.curves.len() as u32 * BAR_LINE + 34);
    let root = SVGBackend::with_string(svg, size).into_drawing_area();
    let values = plot
        .curves
        .iter()
        .filter_map(|curve| Some(curve.points.first()?.y));
    let most = values.fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    for (number, curve) in plot.curves.iter().enumerate() {
        let color = color(curve.source);
        let top = 4 + (number as u32 * BAR_LINE) as i32;
        let value = curve.points.first().map_or(0.0, |point| point.y);
        let length = (value / most * f64::from(WIDTH - NAMES - VALUES)) as i32;
        let from = NAMES as i32;
        let right = text().pos(Pos::new(HPos::Right, VPos::Center));
        let left = text().pos(Pos::new(HPos::Left, VPos::Center));
        let middle = top + BAR_LINE as i32 / 2;
        root.draw(&Text::new(curve.label.clone(), (from - 8, middle), right))?;
        let corners = [
            (from, top + 5),
            (from + length.max(1), top + BAR_LINE as i32 - 5),
        ];
        root.draw(&Rectangle::new(corners, color.filled()))?;
        let place = (from + length.max(1) + 6, middle);
        root.draw(&Text::new(amount(value), place, left))?;
    }
    let place = (NAMES as i32, size.1 as i32 - 22);
    root.draw(&Text::new(plot.y.label.clone(), place, text()))?;
    root.present()
}

fn color(source: Source) -> RGBColor {
    match source {
        Source::Paper => PAPER,
        Source::Kernel => KERNEL,
        Source::Server => SERVER,
        Source::Portolan => FORMS[0],
    }
}

/// Chooses colours: a source has the same colour in all plots, if it has only one curve there.
fn colors(curves: &[Curve]) -> Vec<RGBColor> {
    let mut more = FORMS.iter().cycle();
    let mut used = Vec::new();
    for curve in curves {
        let own = color(curve.source);
        let is_new = curve.source != Source::Portolan && !used.contains(&own);
        used.push(if is_new {
            own
        } else {
            *more.next().expect("it is a cycle")
        });
    }
    used
}

fn text() -> TextStyle<'static> {
    ("sans-serif", LETTERS)
        .with_color(INK)
        .into_text_style(&(WIDTH, HEIGHT))
}

/// Formats a number with three significant digits.
pub(super) fn amount(value: f64) -> String {
    let magnitude = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if !(1e-3..1e6).contains(&magnitude) {
        format!("{value:.1e}")
    } else if magnitude >= 100.0 {
        grouped(value)
    } else if magnitude >= 10.0 {
        format!("{value:.1}")
    } else if magnitude >= 1.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.3}")
    }
}

fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    match digits.len() {
        ..=4 => digits,
        length => format!("{},{}", &digits[..length - 3], &digits[length - 3..]),
    }
}

/// One dimension of a chart, with ticks at round numbers.
struct Axis {
    scale: Scale,
    range: Range<f64>,
    ticks: Vec<f64>,
}

impl Axis {
    fn over(label: &AxisLabel, values: impl Iterator<Item = f64>) -> Axis {
        let values = values.filter(|value| value.is_finite());
        match label.scale {
            Scale::Linear => Axis::linear(values.fold(0.0, f64::max)),
            Scale::Logarithmic => {
                let positive = values.filter(|value| *value > 0.0);
                let (least, most) = positive.fold((f64::INFINITY, 0.0), |(least, most), value| {
                    (value.min(least), value.max(most))
                });
                Axis::logarithmic(least.min(most), most)
            }
        }
    }

    fn linear(most: f64) -> Axis {
        let most = if most > 0.0 { most } else { 1.0 };
        let rough = most / 5.0;
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0]
            .map(|factor| factor * power)
            .into_iter()
            .find(|step| *step >= rough * 0.999)
            .unwrap_or(rough);
        let count = (most / step * 0.999).ceil().max(1.0) as usize;
        let ticks: Vec<_> = (0..=count).map(|number| number as f64 * step).collect();
        Axis {
            scale: Scale::Linear,
            range: 0.0..count as f64 * step,
            ticks,
        }
    }

    fn logarithmic(least: f64, most: f64) -> Axis {
        let (least, most) = if least > 0.0 {
            (least, most)
        } else {
            (1.0, 10.0)
        };
        let decades = (most / least).log10();
        let steps: &[f64] = match decades {
            ..0.6 => &[1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0],
            ..1.5 => &[1.0, 2.0, 3.0, 5.0, 7.0],
            ..3.0 => &[1.0, 2.0, 5.0],
            _ => &[1.0],
        };
        let range = least / 1.15..most * 1.15;
        let first = range.start.log10().floor() as i32;
        let last = range.end.log10().ceil() as i32;
        let all = (first..=last)
            .flat_map(|exponent| steps.iter().map(move |step| step * 10_f64.powi(exponent)));
        Axis {
            scale: Scale::Logarithmic,
            ticks: all.filter(|tick| range.contains(tick)).collect(),
            range,
        }
    }

    fn place(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => value,
            Scale::Logarithmic => value.max(f64::MIN_POSITIVE).log10(),
        }
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let (start, end) = (self.place(self.range.start), self.place(self.range.end));
        let part = ((self.place(*value) - start) / (end - start)).clamp(-0.02, 1.02);
        limit.0 + (f64::from(limit.1 - limit.0) * part).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

impl ValueFormatter<f64> for Axis {
    fn format(value: &f64) -> String {
        let text = amount(*value);
        if text.contains('.') && !text.contains('e') {
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        } else {
            text
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(style: Style, curves: Vec<Curve>) -> Plot {
        Plot {
            title: "a < b".to_owned(),
            x: AxisLabel::logarithmic("x"),
            y: AxisLabel::linear("y"),
            style,
            curves,
        }
    }

    #[test]
    fn axes_have_round_numbers_on_them() {
        assert_eq!(Axis::linear(23.0).ticks, [0.0, 5.0, 10.0, 15.0, 20.0, 25.0]);
        assert_eq!(Axis::linear(0.0).ticks.len(), 6);
        let axis = Axis::logarithmic(1.0, 16_384.0);
        assert_eq!(axis.ticks, [1.0, 10.0, 100.0, 1000.0, 10_000.0]);
        assert_eq!(<Axis as ValueFormatter<f64>>::format(&2.50), "2.5");
    }

    #[test]
    fn every_curve_is_in_the_legend_and_every_colour_has_a_dark_one() {
        let curve = |label: &str, source| Curve::of(label, source, [(1.0, 2.0), (10.0, 3.0)]);
        let curves = vec![
            curve("the kernel", Source::Kernel),
            curve("shm", Source::Portolan),
            curve("ipc", Source::Portolan),
        ];
        for style in [Style::Points, Style::Line, Style::Bars] {
            let svg = draw(&plot(style, curves.clone()));
            assert!(svg.contains("aria-label=\"a &lt; b\""), "{svg}");
            for label in ["the kernel", "shm", "ipc"] {
                assert!(svg.contains(label), "{svg}");
            }
            let known = super::style();
            for part in svg.split("=\"#").skip(1) {
                assert!(
                    known.contains(&format!("#{}", &part[..6])),
                    "{}",
                    &part[..6]
                );
            }
        }
    }

    #[test]
    fn a_plot_of_nothing_is_drawn() {
        assert!(draw(&plot(Style::Points, Vec::new())).starts_with("<svg"));
        assert!(draw(&plot(Style::Bars, Vec::new())).starts_with("<svg"));
        let empty = Curve::of("nothing", Source::Paper, []);
        assert!(draw(&plot(Style::Line, vec![empty])).contains("nothing"));
    }
}
