//! The JSON style of all commands, and the schema that describes their output.
//!
//! Keys are in `snake_case`. Enumerators are lower-case with dashes, except states of sockets, which are spelled as by
//! ss(8). Integers that may exceed 2^53 are strings of decimal digits. A missing value is null. Holders are objects
//! with a `kind`.

use std::fmt;

use portolan_proto::report::Holder;
use portolan_types::{Protocol, SessionId};
use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use crate::exit::{Failure, print};
use crate::table::printable;

/// Prints one value, indented.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    print(serde_json::to_string_pretty(value)?)
}

/// Prints one value on one line, for commands that print a sequence of values.
pub(crate) fn print_json_line(value: &impl Serialize) -> Result<(), Failure> {
    print(serde_json::to_string(value)?)
}

/// The holder of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(crate) enum HolderView {
    /// The server, during set-up and tear-down.
    Server,
    /// The server, which moves the data through the descriptor.
    Relayed,
    /// A process of this host.
    Process { pid: u32, program: String },
}

/// Formats as `pid,program`, `server` or `relayed`.
impl fmt::Display for HolderView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HolderView::Server => f.write_str("server"),
            HolderView::Relayed => f.write_str("relayed"),
            HolderView::Process { pid, program } => write!(f, "{pid},{}", printable(program)),
        }
    }
}

impl From<&Holder> for HolderView {
    fn from(holder: &Holder) -> HolderView {
        match holder {
            Holder::Server => HolderView::Server,
            Holder::Relayed => HolderView::Relayed,
            Holder::Process { pid, program } => HolderView::Process {
                pid: *pid,
                program: program.clone(),
            },
        }
    }
}

pub(crate) fn protocol(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
    }
}

/// The session number in decimal digits; null if the caller may not know it.
pub(crate) fn session(id: SessionId) -> Option<String> {
    (id.0 != 0).then(|| id.0.to_string())
}

/// Serializes a rate or a share, rounded to a thousandth; null if it is not finite.
pub(crate) fn measure<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    let rounded = (value * 1000.0).round() / 1000.0;
    if rounded.is_finite() {
        // Adding zero turns a negative zero into a positive one.
        serializer.serialize_f64(rounded + 0.0)
    } else {
        serializer.serialize_none()
    }
}

/// The schema of values that [`measure`] serializes.
pub(crate) fn measure_schema(generator: &mut SchemaGenerator) -> Schema {
    <Option<f64>>::json_schema(generator)
}

/// Returns the schema of each command's `--json` output, by the command's name in `$defs`.
pub(crate) fn schema() -> Value {
    let mut generator = SchemaSettings::draft2020_12()
        .for_serialize()
        .into_generator();
    let mut commands = Map::new();
    let mut add = |name: &str, schema: Schema| commands.insert(name.to_owned(), schema.into());
    add(
        "ss",
        generator.subschema_for::<Vec<crate::ss::SocketView>>(),
    );
    add(
        "ss --summary",
        generator.subschema_for::<crate::ss::SummaryView>(),
    );
    add(
        "nstat",
        generator.subschema_for::<crate::nstat::NstatView>(),
    );
    add(
        "counters",
        generator.subschema_for::<Vec<crate::counters::CounterView>>(),
    );
    add(
        "status",
        generator.subschema_for::<crate::status::StatusView>(),
    );
    add(
        "doctor",
        generator.subschema_for::<Vec<crate::doctor::Check>>(),
    );
    add("top", generator.subschema_for::<crate::top::View>());
    add("qos show", generator.subschema_for::<crate::qos::QosView>());
    add(
        "qos watch",
        generator.subschema_for::<crate::qos::RatesView>(),
    );
    add(
        "qos group join",
        generator.subschema_for::<crate::qos::JoinedView>(),
    );
    add(
        "ext list",
        generator.subschema_for::<Vec<crate::ext::ExtensionView>>(),
    );
    add(
        "ext stats",
        generator.subschema_for::<Vec<crate::ext::StatisticsView>>(),
    );
    add(
        "ext install",
        generator.subschema_for::<crate::ext::InstalledView>(),
    );
    add(
        "ext check",
        generator.subschema_for::<crate::ext::CostView>(),
    );
    add(
        "ps",
        generator.subschema_for::<Vec<crate::ps::ProcessView>>(),
    );
    let definitions = generator.take_definitions(true);
    serde_json::json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What portolan prints with --json",
        "description": "Of each command, by its name. `qos watch` and `top` print one value a line.",
        "properties": commands,
        "$defs": definitions,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_in_the_reference_is_up_to_date() {
        let page = include_str!("../../../docs/reference/portolan.schema.json");
        let page: Value = serde_json::from_str(page).expect("it is JSON");
        assert_eq!(page, schema(), "`make doc` writes it anew");
    }

    #[test]
    fn measures_have_neither_a_negative_zero_nor_an_infinity() {
        #[derive(Serialize)]
        struct Measured(#[serde(serialize_with = "measure")] f64);
        let shown = |value| serde_json::to_string(&Measured(value)).unwrap();
        assert_eq!(shown(-0.0), "0.0");
        assert_eq!(shown(-0.0001), "0.0");
        assert_eq!(shown(1.23456), "1.235");
        assert_eq!(shown(f64::INFINITY), "null");
        assert_eq!(shown(f64::NAN), "null");
    }

    /// Collects every key of every schema.
    fn keys(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(object) => {
                if let Some(Value::Object(properties)) = object.get("properties") {
                    found.extend(properties.keys().cloned());
                }
                object.values().for_each(|value| keys(value, found));
            }
            Value::Array(list) => list.iter().for_each(|value| keys(value, found)),
            _ => {}
        }
    }

    #[test]
    fn all_keys_are_of_one_style() {
        let mut found = Vec::new();
        keys(&schema()["$defs"], &mut found);
        assert!(found.len() > 100, "{}", found.len());
        for key in found {
            let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            assert!(key.chars().all(is_plain), "{key}");
        }
    }
}
