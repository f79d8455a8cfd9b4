//! Command-line options derived from the types that they set: the words of an enum, and the fields
//! of a request of the API.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Arg, ArgMatches, Command, value_parser};
use ebb_vmm::api::fields::{bounds, choices, request_schema};
use ebb_vmm::config::Switch;
use ebb_vmm::size::ByteSize;
use ebb_vmm::words::{from_word, words};
use schemars::{JsonSchema, Schema};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Parser for the words of `T`, an enum without fields.
pub fn word<T: DeserializeOwned + Clone + Send + Sync + 'static>()
-> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(words::<T>())
        .try_map(|word| from_word(&word).ok_or_else(|| format!("unknown word '{word}'")))
}

/// A request of the API with an option for each field, with the field's description and bounds.
#[derive(Clone, Debug)]
pub struct Settings<T>(pub T);

fn properties(schema: &Schema) -> impl Iterator<Item = (&String, &Value)> {
    schema.get("properties").and_then(Value::as_object).into_iter().flatten()
}

fn option(name: &str, property: &Value) -> Arg {
    let help = property["description"].as_str().unwrap_or_default().replace('\n', " ");
    let arg = Arg::new(name.to_owned())
        .long(name.replace('_', "-"))
        .value_name(name.to_uppercase())
        .help(help.trim_end_matches('.').to_owned());
    let arg = match property["x-conflicts-with"].as_str() {
        Some(other) => arg.conflicts_with(other.to_owned()),
        None => arg,
    };
    let arg = match &property["default"] {
        Value::Null => arg,
        default => arg.default_value(default.to_string()),
    };
    match (choices(property), property["type"].as_str()) {
        (Some(words), _) => {
            let words = words.into_iter().map(str::to_owned).collect::<Vec<_>>();
            arg.value_parser(PossibleValuesParser::new(words))
        }
        (None, Some("boolean")) => arg.value_parser(word::<Switch>()),
        _ if property["x-unit"] == "bytes" => {
            let (least, most) = bounds(property);
            arg.value_name("SIZE").value_parser(move |text: &str| {
                let bytes = text.parse::<ByteSize>().map_err(|error| error.to_string())?.bytes();
                let inside = (least..=most).contains(&bytes);
                inside.then_some(bytes).ok_or_else(|| format!("give {least} to {most} bytes"))
            })
        }
        _ => {
            let (least, most) = bounds(property);
            arg.value_name("N").value_parser(value_parser!(u64).range(least..=most))
        }
    }
}

fn value(name: &str, property: &Value, matches: &ArgMatches) -> Option<Value> {
    match (choices(property), property["type"].as_str()) {
        (Some(_), _) => matches.get_one::<String>(name).map(|word| word.as_str().into()),
        (None, Some("boolean")) => {
            matches.get_one::<Switch>(name).map(|switch| switch.is_on().into())
        }
        _ => matches.get_one::<u64>(name).map(|number| (*number).into()),
    }
}

impl<T: JsonSchema + DeserializeOwned> clap::Args for Settings<T> {
    fn augment_args(command: Command) -> Command {
        let schema = request_schema::<T>();
        command.args(properties(&schema).map(|(name, property)| option(name, property)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<T: JsonSchema + DeserializeOwned> clap::FromArgMatches for Settings<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let schema = request_schema::<T>();
        let given: Map<_, _> = properties(&schema)
            .filter_map(|(name, property)| Some((name.clone(), value(name, property, matches)?)))
            .collect();
        serde_json::from_value(given.into())
            .map(Self)
            .map_err(|error| clap::Error::raw(clap::error::ErrorKind::ValueValidation, error))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
